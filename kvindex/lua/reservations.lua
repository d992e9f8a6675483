-- Put in front of the scripts that change reservations. Keys: see keyspace.lua.

local LOAD = '>I8I8I8'

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
  uncount(target, reservation)
  local hashes = redis.call('HGET', reservation, 'pending') or ''
  each_chunk(hashes, function(members)
    for position, hash in ipairs(members) do
      members[position] = hash .. id
    end
    redis.call('ZREM', key('pending', target), unpack(members))
  end)
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
