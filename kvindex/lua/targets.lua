-- Put in front of the scripts that end targets; needs inventory.lua and reservations.lua.

-- Drop everything of a target but its epoch, which is remembered for a day.
local function drop_target(target)
  local state = key('target', target)
  local gen = redis.call('HGET', state, 'gen')
  if gen then
    inventory_drop(target, gen)
  end
  forget_target(target)
  redis.call('UNLINK', state)
  redis.call('ZREM', key('leases'), target)
  redis.call('EXPIRE', key('epoch', target), EPOCH_MEMORY_S)
end

-- Reclaim targets whose lease has lapsed; at most `limit`, so that no call takes long.
local function reclaim(now, limit)
  local lapsed = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', integer(now), 'LIMIT', 0, limit)
  for _, target in ipairs(lapsed) do
    drop_target(target)
  end
end
