-- Swap a complete shadow in; the inventory before it is dropped.
-- ARGV: target, epoch, shadow, next sequence number.
-- Returns 1; 0 when fenced or when the shadow was given up. Writes slots, roster, next_seqs,
-- shadows, dropped, and what sweeping needs.

local target, epoch, shadow, next_seq = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now = now_ms()
local slot = shadow_slot(shadow, now)
if not slot or not is_current(target, epoch, now) then
  return 0
end
slot_drop(redis.call('HGET', key('slots'), target))
slot_give(target, slot)
redis.call('HSET', key('next_seqs'), target, next_seq)
redis.call('ZREM', key('shadows'), shadow)
slots_sweep()
return 1
