-- Extend the lease of a target and store its report.
-- ARGV: target, epoch, lease_ms, report. Returns 1; 0 when the lease lapsed or the epoch is old.
-- Writes leases, reports, reported, roster; reclaims other targets whose lease has lapsed.

local target, epoch, lease_ms, report = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local now = now_ms()
local current = is_current(target, epoch, now)
if current then
  redis.call('ZADD', key('leases'), integer(now + lease_ms), target)
  report_take(target, report)
end
reclaim(now, 4)
return current and 1 or 0
