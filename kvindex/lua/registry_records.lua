-- List the replica records that have not lapsed, flat: id, signed record, ... Writes nothing.
-- KEYS[1]: HASH as in registry_publish.lua.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local answer = {}
local records = redis.call('HGETALL', KEYS[1])
for position = 1, #records, 2 do
  local lapses_at, record = string.match(records[position + 1], '^(%d+)\n(.*)$')
  if lapses_at and tonumber(lapses_at) > now then
    answer[#answer + 1] = records[position]
    answer[#answer + 1] = record
  end
end
return answer
