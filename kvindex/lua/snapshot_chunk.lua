-- Add a part of a snapshot to a shadow generation, which nobody reads yet.
-- ARGV: target, epoch, gen, shadow_ttl_ms, "<group>:<tier>", concatenated 8-byte hashes.
-- Returns 1; 0 when fenced. Writes parts: and held: of the shadow, which expire when abandoned.

local target, epoch, gen, ttl_ms, part, hashes =
  ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
if not is_current(target, epoch, now_ms()) then
  inventory_drop(target, gen)
  return 0
end
inventory_add(target, gen, part, hashes)
for _, added in ipairs(redis.call('SMEMBERS', key('parts', target, gen))) do
  redis.call('PEXPIRE', part_key(target, gen, added), ttl_ms)
end
redis.call('PEXPIRE', key('parts', target, gen), ttl_ms)
return 1
