-- Open a shadow: an inventory that nobody reads until it is committed.
-- ARGV: target, epoch, token, shadow_ttl_ms. Returns the shadow's name; nil when fenced.
-- Writes shadows; takes a slot.

local target, epoch, token, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local now = now_ms()
if not is_current(target, epoch, now) then
  return false
end
local shadow = slot_open() .. ':' .. token
redis.call('ZADD', key('shadows'), integer(now + ttl_ms), shadow)
return shadow
