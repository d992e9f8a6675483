-- Stop counting a reservation; what is unknown changes nothing.
-- ARGV: target, id, "written" (its pending blocks stay so until their time is over, for their
-- events may still be on the way) or "withdrawn". Writes load:, reservation:, reservations:,
-- pending:.

local target, id, outcome = ARGV[1], ARGV[2], ARGV[3]
local reservation = reservation_key(target, id)
local now = now_ms()
local pending_until = tonumber(redis.call('HGET', reservation, 'pending_until') or 0)
if outcome == 'written' and pending_until > now then
  uncount(target, reservation)
  redis.call('ZADD', key('reservations', target), integer(pending_until), id)
else
  forget(target, id)
end
return 1
