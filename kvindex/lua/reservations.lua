-- Put in front of the scripts that change reservations. Keys: see keyspace.lua.

local LOAD = '>I8I8I8'
-- Stands before each id of a list; no UTF-8 has it.
local BEFORE_ID = '\255'

local function reservation_key(target, id)
  return key('reservation', target, id)
end

-- Change what a gateway has reserved at a target; without requests there is nothing.
local function load_change(gateway, target, tokens, blocks, requests)
  local load = key('load', gateway)
  local packed = redis.call('HGET', load, target)
  if packed then
    local sums = { struct.unpack(LOAD, packed) }
    tokens, blocks, requests = sums[1] + tokens, sums[2] + blocks, sums[3] + requests
  end
  if requests > 0 then
    redis.call('HSET', load, target, struct.pack(LOAD, tokens, blocks, requests))
  else
    redis.call('HDEL', load, target)
  end
end

-- Call `change` with the list of ids of which each block is pending at a target; what it returns is
-- the list from now on.
local function pending_change(target, hashes, change)
  local pending = key('pending', target)
  each_chunk(hashes, function(members)
    local kept, gone = {}, {}
    for position, ids in ipairs(redis.call('HMGET', pending, unpack(members))) do
      ids = change(ids or '')
      if ids ~= '' then
        kept[#kept + 1] = members[position]
        kept[#kept + 1] = ids
      else
        gone[#gone + 1] = members[position]
      end
    end
    if #kept > 0 then
      redis.call('HSET', pending, unpack(kept))
    end
    if #gone > 0 then
      redis.call('HDEL', pending, unpack(gone))
    end
  end)
end

local function pending_add(target, id, hashes)
  pending_change(target, hashes, function(ids)
    return ids .. BEFORE_ID .. id
  end)
end

local function pending_remove(target, id, hashes)
  local listed = BEFORE_ID .. id .. BEFORE_ID
  pending_change(target, hashes, function(ids)
    local first, last = string.find(ids .. BEFORE_ID, listed, 1, true)
    return first and string.sub(ids, 1, first - 1) .. string.sub(ids, last) or ids
  end)
end

-- Take a reservation's tokens out of the sums; what is not counted any more stays out.
local function uncount_tokens(target, reservation)
  local gateway, tokens = unpack(redis.call('HMGET', reservation, 'gateway', 'tokens'))
  if gateway and tokens ~= '0' then
    load_change(gateway, target, 0 - tokens, 0, 0)
    redis.call('HSET', reservation, 'tokens', 0)
  end
end

-- Take a whole reservation out of the sums, once.
local function uncount(target, reservation)
  local gateway, tokens, blocks, counted =
    unpack(redis.call('HMGET', reservation, 'gateway', 'tokens', 'blocks', 'counted'))
  if counted == '1' then
    load_change(gateway, target, 0 - tokens, 0 - blocks, -1)
    redis.call('HSET', reservation, 'tokens', 0, 'counted', 0)
  end
end

-- Forget a reservation and withdraw its pending blocks.
local function forget(target, id)
  local reservation = reservation_key(target, id)
  local gateway, tokens, blocks, counted, pending =
    unpack(redis.call('HMGET', reservation, 'gateway', 'tokens', 'blocks', 'counted', 'pending'))
  if counted == '1' then
    load_change(gateway, target, 0 - tokens, 0 - blocks, -1)
  end
  pending_remove(target, id, pending or '')
  redis.call('UNLINK', reservation)
  redis.call('ZREM', key('reservations', target), id)
  if redis.call('EXISTS', key('reservations', target)) == 0 then
    redis.call('HDEL', key('reserving'), target)
  end
end

-- Forget reservations that ended and whose pending blocks have had their time; at most `limit`.
local function forget_ended(target, now, limit)
  local index = key('reservations', target)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', integer(now), 'LIMIT', 0, limit)) do
    forget(target, id)
  end
end

local function forget_target(target)
  local index = key('reservations', target)
  for _, id in ipairs(redis.call('ZRANGE', index, 0, -1)) do
    redis.call('UNLINK', reservation_key(target, id))
  end
  redis.call('UNLINK', index, key('pending', target))
  redis.call('HDEL', key('reserving'), target)
  for _, gateway in ipairs(redis.call('ZRANGE', key('gateways'), 0, -1)) do
    redis.call('HDEL', key('load', gateway), target)
  end
end

local function forget_gateway(target, gateway)
  for _, id in ipairs(redis.call('ZRANGE', key('reservations', target), 0, -1)) do
    if redis.call('HGET', reservation_key(target, id), 'gateway') == gateway then
      forget(target, id)
    end
  end
end
