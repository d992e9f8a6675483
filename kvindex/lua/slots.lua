-- Put behind inventory.lua in scripts that open or drop inventories: the life of a slot.
--
-- A dropped slot is invisible at once. Its members are swept out of the tables bucket by bucket,
-- a few with each call that sweeps, and then the slot is free for another inventory. A shadow is a
-- slot that a snapshot is being loaded into, which nobody reads; it is named "<slot>:<token>".

local SWEEP_BUCKETS = 8

-- Returns a slot that holds nothing, the lowest: shelves stay full.
local function slot_open()
  local slot = redis.call('ZPOPMIN', key('free'))[1] or redis.call('INCR', key('last_slot'))
  if tonumber(slot) > MAX_SLOTS then
    redis.call('DECR', key('last_slot'))
    error('all ' .. MAX_SLOTS .. ' inventories of the pool are in use or not swept yet')
  end
  return slot
end

local function slot_drop(slot)
  local is_empty = true
  for _, part in ipairs(redis.call('SMEMBERS', key('parts'))) do
    if tonumber(redis.call('HGET', key('table', part), '#' .. slot) or 0) > 0 then
      is_empty = false
    end
  end
  if is_empty then
    redis.call('ZADD', key('free'), slot, slot)
  else
    redis.call('SADD', key('dropped'), slot)
  end
end

local function sweep_bucket(opened, bucket, swept)
  local dead = {}
  for _, member in ipairs(redis.call('SMEMBERS', bucket_key(opened, bucket))) do
    local slot = swept[string.sub(member, 1, -1 - DIGITS)]
    if slot then
      dead[slot] = dead[slot] or {}
      table.insert(dead[slot], member)
    end
  end
  for slot, members in pairs(dead) do
    close_table(opened, slot, 0 - change_set('SREM', bucket_key(opened, bucket), members))
  end
end

-- Sweep on in one part; returns what is left of `budget`, 0 when there is more to do.
local function sweep_part(part, swept, budget)
  local opened, cursors = open_table(part), key('swept')
  local bucket = tonumber(redis.call('HGET', cursors, part) or 0)
  while bucket < opened.num_buckets and budget > 0 do
    sweep_bucket(opened, bucket, swept)
    bucket, budget = bucket + 1, budget - 1
  end
  redis.call('HSET', cursors, part, bucket)
  if bucket < opened.num_buckets then
    return 0
  end
  for _, slot in pairs(swept) do
    redis.call('HDEL', opened.name, '#' .. slot)
  end
  return budget
end

-- Note that a target came, went or changed its slot: no roster that a client knows holds any more.
-- The time makes the stamps of an emptied server others than those before.
local function roster_change()
  local time, roster = redis.call('TIME'), key('roster')
  local change = redis.call('HINCRBY', roster, 'changes', 1)
  redis.call('HSET', roster, 'stamp', change .. '@' .. time[1] .. '.' .. time[2])
end

local function slot_give(target, slot)
  redis.call('HSET', key('slots'), target, slot)
  roster_change()
end

-- Sweep dropped slots out of the tables, as far as one call may. Slots that are dropped during a
-- pass wait for the next one; buckets that are split meanwhile are met again at the end.
local function slots_sweep()
  local sweeping = key('sweeping')
  if redis.call('EXISTS', sweeping) == 0 then
    if redis.call('EXISTS', key('dropped')) == 0 then
      return
    end
    redis.call('RENAME', key('dropped'), sweeping)
  end
  local swept = {}
  for _, slot in ipairs(redis.call('SMEMBERS', sweeping)) do
    swept[prefix_of(slot)] = slot
  end
  local budget = SWEEP_BUCKETS
  for _, part in ipairs(redis.call('SMEMBERS', key('parts'))) do
    budget = sweep_part(part, swept, budget)
    if budget == 0 then
      return
    end
  end
  for _, slot in pairs(swept) do
    redis.call('ZADD', key('free'), slot, slot)
  end
  redis.call('UNLINK', sweeping, key('swept'))
end

-- Give up the shadows whose time is over.
local function shadows_expire(now)
  local shadows = key('shadows')
  for _, shadow in ipairs(redis.call('ZRANGEBYSCORE', shadows, '-inf', integer(now))) do
    slot_drop(string.match(shadow, '^%d+'))
    redis.call('ZREM', shadows, shadow)
  end
end

-- Returns the slot of a shadow that is not given up yet, else nil.
local function shadow_slot(shadow, now)
  if tonumber(redis.call('ZSCORE', key('shadows'), shadow) or 0) > now then
    return string.match(shadow, '^%d+')
  end
end
