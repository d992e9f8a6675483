-- Tell how much of a chain each live target holds, and how loaded it is. Writes nothing.
-- ARGV: concatenated 8-byte hashes of the chain.
-- Returns per live target {target, epoch, report, matched, pending, tokens, blocks, requests}.
--
-- An inventory is prefix-closed (a block is held only while its parent is), so the longest prefix
-- is found with O(log n) probes; a target without block 0 costs one.

local chain = ARGV[1]
local length = #chain / HASH_BYTES
local now = now_ms()

local function hash_at(position)
  return string.sub(chain, position * HASH_BYTES + 1, (position + 1) * HASH_BYTES)
end

-- The number of positions from `first` on for which `holds` is true, galloping, then halving.
local function longest_run(first, holds)
  if first >= length or not holds(first) then
    return 0
  end
  local held, step = first, 1
  local missing = held + step
  while missing < length and holds(missing) do
    held, step = missing, step * 2
    missing = held + step
  end
  missing = math.min(missing, length)
  while missing - held > 1 do
    local middle = math.floor((held + missing) / 2)
    if holds(middle) then held = middle else missing = middle end
  end
  return held - first + 1
end

local live_gateways = {}
for _, gateway in ipairs(
  redis.call('ZRANGEBYSCORE', key('gateways'), '(' .. integer(now), '+inf')) do
  live_gateways[gateway] = true
end

local function is_pending(target, id)
  local fields = redis.call('HMGET', key('reservation', target, id), 'gateway', 'pending_until')
  return fields[1] and live_gateways[fields[1]] and tonumber(fields[2]) > now
end

local function pending_reader(target)
  local pending = key('pending', target)
  local page = 16
  return function(position)
    local hash = hash_at(position)
    for offset = 0, math.huge, page do
      local found = redis.call('ZRANGEBYLEX', pending, '[' .. hash, '+', 'LIMIT', offset, page)
      for _, member in ipairs(found) do
        if string.sub(member, 1, HASH_BYTES) ~= hash then
          return false
        elseif is_pending(target, string.sub(member, HASH_BYTES + 1)) then
          return true
        end
      end
      if #found < page then
        return false
      end
    end
  end
end

local function reserved(target)
  local sums = { tokens = 0, blocks = 0, requests = 0 }
  local load = redis.call('HGETALL', key('load', target))
  for field = 1, #load, 2 do
    local gateway, what = string.match(load[field], '^(.*)|(%a+)$')
    if live_gateways[gateway] then
      sums[what] = sums[what] + tonumber(load[field + 1])
    end
  end
  return sums
end

local answer = {}
for _, target in ipairs(
  redis.call('ZRANGEBYSCORE', key('leases'), '(' .. integer(now), '+inf')) do
  local state = redis.call('HMGET', key('target', target), 'epoch', 'gen', 'report')
  local matched = longest_run(0, inventory_reader(target, state[2], hash_at))
  local pending = 0
  if matched < length and redis.call('EXISTS', key('pending', target)) == 1 then
    pending = longest_run(matched, pending_reader(target))
  end
  local sums = reserved(target)
  answer[#answer + 1] = {
    target, state[1], state[3], matched, pending, sums.tokens, sums.blocks, sums.requests
  }
end
return answer
