-- Apply event batches in order, each at most once, up to the first gap.
-- ARGV: target, epoch, then per batch: seq, number of operations, and per operation: kind,
-- "<group>:<tier>", concatenated 8-byte hashes.
-- Returns {status, next sequence number}, the latter 0 when fenced. Writes target:, parts:, held:.

local target, epoch = ARGV[1], ARGV[2]
if not is_current(target, epoch, now_ms()) then
  return { 'fenced', 0 }
end
local state = key('target', target)
local fields = redis.call('HMGET', state, 'gen', 'next_seq')
local gen, next_seq = fields[1], tonumber(fields[2] or 0)
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
      inventory_drop(target, gen)
    else
      change[kind](target, gen, ARGV[operation + 1], ARGV[operation + 2])
    end
  end
  position = position + 3 * num_ops
  next_seq = math.max(next_seq, seq + 1)
end
redis.call('HSET', state, 'next_seq', integer(next_seq))
return { status, next_seq }
