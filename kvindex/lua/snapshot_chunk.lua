-- Add blocks to a shadow, and prolong its life.
-- ARGV: target, epoch, shadow, shadow_ttl_ms, "<group>:<tier>", concatenated 8-byte hashes.
-- Returns 1; 0 when fenced or when the shadow was given up. Writes parts, table:, held:, shadows.

local target, epoch, shadow, ttl_ms, part, hashes =
  ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
local now = now_ms()
local slot = shadow_slot(shadow, now)
if not slot or not is_current(target, epoch, now) then
  return 0
end
inventory_add(slot, part, hashes)
redis.call('ZADD', key('shadows'), integer(now + ttl_ms), shadow)
return 1
