-- Count work that gateways send to targets, and stop counting it, in the order given.
-- ARGV: any number of these, one behind the other:
--   reserve, target, id, gateway, tokens, blocks, pending_ttl_ms, concatenated 8-byte pending hashes:
--     counted once per id; not at all for a target or a gateway without a live lease, as nobody
--     would take it back;
--   prefill_end, target, id: the prefill tokens of a reservation are counted no more;
--   release, target, id, "written" (its pending blocks stay so until their time is over, for their
--     events may still be on the way) or "withdrawn": nothing of it is counted any more.
-- What is unknown changes nothing. Returns 1. Writes load:, reservation:, reservations:, reserving,
-- pending:.

local now = now_ms()

local function reserve(target, id, gateway, tokens, blocks, ttl_ms, hashes)
  forget_ended(target, now, 16)
  local reservation = reservation_key(target, id)
  if lease_lapses_at(target) <= now or not is_gateway_live(gateway, now)
    or redis.call('EXISTS', reservation) == 1 then
    return
  end
  redis.call('HSET', reservation, 'gateway', gateway, 'tokens', tokens, 'blocks', blocks,
    'counted', 1, 'pending_until', integer(now + ttl_ms), 'pending', hashes)
  redis.call('ZADD', key('reservations', target), 'inf', id)
  local pending_until = tonumber(redis.call('HGET', key('reserving'), target) or 0)
  if hashes ~= '' then
    pending_until = math.max(pending_until, now + ttl_ms)
  end
  redis.call('HSET', key('reserving'), target, integer(pending_until))
  load_change(gateway, target, tonumber(tokens), tonumber(blocks), 1)
  pending_add(target, id, hashes)
end

local function release(target, id, outcome)
  local reservation = reservation_key(target, id)
  local pending_until = outcome == 'written' and redis.call('HGET', reservation, 'pending_until')
  if pending_until and tonumber(pending_until) > now then
    uncount(target, reservation)
    redis.call('ZADD', key('reservations', target), pending_until, id)
  else
    forget(target, id)
  end
end

local at = 1
while at <= #ARGV do
  local kind, target, id = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  if kind == 'reserve' then
    reserve(target, id, ARGV[at + 3], ARGV[at + 4], ARGV[at + 5], tonumber(ARGV[at + 6]), ARGV[at + 7])
    at = at + 8
  elseif kind == 'prefill_end' then
    uncount_tokens(target, reservation_key(target, id))
    at = at + 3
  else
    release(target, id, ARGV[at + 3])
    at = at + 4
  end
end
return 1
