-- Put in front of the scripts that end targets; needs slots.lua and reservations.lua.

-- Drop everything of a target but its epoch, which is remembered for a day.
local function drop_target(target)
  local slot = redis.call('HGET', key('slots'), target)
  if slot then
    slot_drop(slot)
  end
  forget_target(target)
  for _, column in ipairs({ 'epochs', 'slots', 'next_seqs', 'reports', 'layouts' }) do
    redis.call('HDEL', key(column), target)
  end
  redis.call('ZREM', key('leases'), target)
  redis.call('ZREM', key('reported'), target)
  roster_change()
  redis.call('EXPIRE', key('epoch', target), EPOCH_MEMORY_S)
end

local function report_take(target, report)
  redis.call('HSET', key('reports'), target, report)
  redis.call('ZADD', key('reported'), redis.call('HINCRBY', key('roster'), 'reports', 1), target)
end

-- Reclaim targets whose lease has lapsed, at most `limit`, and a part of what was dropped: no call
-- takes long.
local function reclaim(now, limit)
  local lapsed = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', integer(now), 'LIMIT', 0, limit)
  for _, target in ipairs(lapsed) do
    drop_target(target)
  end
  shadows_expire(now)
  slots_sweep()
end
