-- Put in front of the scripts that change reservations. Keys: see keyspace.lua.

local function reservation_key(target, id)
  return key('reservation', target, id)
end

-- Redis refuses "-0", so numbers are subtracted from 0 instead of negated.
local function subtract(load, field, amount)
  return redis.call('HINCRBY', load, field, 0 - tonumber(amount))
end

-- Take a reservation's tokens out of the sums; what is not counted any more stays out.
local function uncount_tokens(target, reservation)
  local fields = redis.call('HMGET', reservation, 'gateway', 'tokens')
  if fields[1] and fields[2] ~= '0' then
    subtract(key('load', target), fields[1] .. '|tokens', fields[2])
    redis.call('HSET', reservation, 'tokens', 0)
  end
end

-- Take a whole reservation out of the sums, once.
local function uncount(target, reservation)
  local fields = redis.call('HMGET', reservation, 'gateway', 'blocks', 'counted')
  if fields[3] ~= '1' then
    return
  end
  uncount_tokens(target, reservation)
  local load, gateway = key('load', target), fields[1]
  subtract(load, gateway .. '|blocks', fields[2])
  redis.call('HSET', reservation, 'counted', 0)
  if subtract(load, gateway .. '|requests', 1) == 0 then
    redis.call('HDEL', load, gateway .. '|tokens', gateway .. '|blocks', gateway .. '|requests')
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
    redis.call('SREM', key('reserving'), target)
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
  redis.call('UNLINK', index, key('pending', target), key('load', target))
  redis.call('SREM', key('reserving'), target)
end

local function forget_gateway(target, gateway)
  for _, id in ipairs(redis.call('ZRANGE', key('reservations', target), 0, -1)) do
    if redis.call('HGET', reservation_key(target, id), 'gateway') == gateway then
      forget(target, id)
    end
  end
end
