-- Swap a complete shadow generation in; the inventory before it is dropped.
-- ARGV: target, epoch, gen, next sequence number, number of parts.
-- Returns 1; 0 when fenced or when the shadow expired. Writes target:, held:, parts:.

local target, epoch, gen, next_seq, num_parts = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local parts = redis.call('SMEMBERS', key('parts', target, gen))
if #parts ~= num_parts or not is_current(target, epoch, now_ms()) then
  inventory_drop(target, gen)
  return 0
end
for _, part in ipairs(parts) do
  redis.call('PERSIST', part_key(target, gen, part))
end
redis.call('PERSIST', key('parts', target, gen))
local state = key('target', target)
inventory_drop(target, redis.call('HGET', state, 'gen'))
redis.call('HSET', state, 'gen', gen, 'next_seq', next_seq)
return 1
