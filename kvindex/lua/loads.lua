-- Put behind search.lua in match.lua: what live gateways have reserved at a target.

local now = now_ms()
local live_gateways = {}
for _, gateway in ipairs(call('ZRANGEBYSCORE', key('gateways'), '(' .. integer(now), '+inf')) do
  live_gateways[gateway] = true
end

local function is_pending(target, id)
  local fields = call('HMGET', key('reservation', target, id), 'gateway', 'pending_until')
  return fields[1] and live_gateways[fields[1]] and tonumber(fields[2]) > now
end

local function pending_at(target, position)
  local hash = string.sub(chain, position * HASH_BYTES + 1, (position + 1) * HASH_BYTES)
  -- No id begins with the byte 255, which is none of UTF-8's.
  local first, last, page = '[' .. hash, '(' .. hash .. '\255', 16
  for offset = 0, math.huge, page do
    local found = call('ZRANGEBYLEX', key('pending', target), first, last, 'LIMIT', offset, page)
    for _, member in ipairs(found) do
      if is_pending(target, string.sub(member, HASH_BYTES + 1)) then
        return true
      end
    end
    if #found < page then
      return false
    end
  end
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
