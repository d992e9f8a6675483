-- Apply event batches in order, each at most once, up to the first gap.
-- ARGV: target, epoch, then per batch: seq, number of operations, and per operation: kind,
-- "<group>:<tier>", concatenated 8-byte hashes.
-- Returns {status, next sequence number}, the latter 0 when fenced. Writes next_seqs, slots,
-- roster, parts, table:, held:, dropped.

local target, epoch = ARGV[1], ARGV[2]
if not is_current(target, epoch, now_ms()) then
  return { 'fenced', 0 }
end
local slot = redis.call('HGET', key('slots'), target)
local next_seq = tonumber(redis.call('HGET', key('next_seqs'), target) or 0)
local has_cleared = false
local change = { stored = inventory_add, removed = inventory_remove }

local status, position = 'applied', 3
while position <= #ARGV do
  local seq, num_ops = tonumber(ARGV[position]), tonumber(ARGV[position + 1])
  if seq > next_seq then
    status = 'gap'
    break
  end
  position = position + 2
  for operation = position, position + 3 * (num_ops - 1), 3 do
    local kind = ARGV[operation]
    if seq < next_seq then
      break
    elseif kind == 'cleared' then
      slot_drop(slot)
      slot = slot_open()
      has_cleared = true
      slot_give(target, slot)
    else
      change[kind](slot, ARGV[operation + 1], ARGV[operation + 2])
    end
  end
  position = position + 3 * num_ops
  next_seq = math.max(next_seq, seq + 1)
end
redis.call('HSET', key('next_seqs'), target, integer(next_seq))
if has_cleared then
  slots_sweep()
end
return { status, next_seq }
