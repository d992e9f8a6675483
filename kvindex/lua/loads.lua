-- Put behind search.lua in match.lua: what live gateways have reserved at a target.

local now = now_ms()
local live_gateways = {}
for _, gateway in ipairs(call('ZRANGEBYSCORE', key('gateways'), '(' .. integer(now), '+inf')) do
  live_gateways[gateway] = true
end

-- True when a block is pending at a target: of those who said so, some gateway lives, and the time of
-- its reservation is not over.
local function pending_at(target, position)
  local hash = string.sub(chain, position * HASH_BYTES + 1, (position + 1) * HASH_BYTES)
  local ids = call('HGET', key('pending', target), hash)
  for id in string.gmatch(ids or '', '[^\255]+') do
    local fields = call('HMGET', key('reservation', target, id), 'gateway', 'pending_until')
    if fields[1] and live_gateways[fields[1]] and tonumber(fields[2]) > now then
      return true
    end
  end
  return false
end

-- The number of positions from `first` on that are pending, by halving.
local function pending_run(target, first)
  if first >= length or not pending_at(target, first) then
    return 0
  end
  local held, missing = first, length
  while missing - held > 1 do
    local middle = math.floor((held + missing) / 2)
    if pending_at(target, middle) then held = middle else missing = middle end
  end
  return held - first + 1
end

-- Returns, for each live gateway, what it has reserved where: target, packed sums, ...
local function loads_of_gateways()
  local loads = {}
  for gateway in pairs(live_gateways) do
    loads[#loads + 1] = call('HGETALL', key('load', gateway))
  end
  return loads
end
