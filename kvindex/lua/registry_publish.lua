-- Write a replica record and forget the lapsed ones.
-- KEYS[1]: HASH  replica id -> "<instant (ms) of its lapse>\n<signed record>". ARGV: id, lease_ms,
-- signed record.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local records = redis.call('HGETALL', KEYS[1])
for position = 1, #records, 2 do
  local lapses_at = tonumber(string.match(records[position + 1], '^(%d+)\n') or 0)
  if lapses_at <= now then
    redis.call('HDEL', KEYS[1], records[position])
  end
end
local lapses_at = string.format('%.0f', now + tonumber(ARGV[2]))
redis.call('HSET', KEYS[1], ARGV[1], lapses_at .. '\n' .. ARGV[3])
return 1
