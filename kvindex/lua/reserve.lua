-- Count work that a gateway sends to a target, once per id.
-- ARGV: target, id, gateway, tokens, blocks, pending_ttl_ms, concatenated 8-byte pending hashes.
-- Returns 1. Writes load:, reservation:, reservations:, reserving, pending:. Nothing is counted for a
-- target or a gateway without a live lease: nobody would take it back.

local target, id, gateway, tokens, blocks, ttl_ms, hashes =
  ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
local now = now_ms()
forget_ended(target, now, 16)
local reservation = reservation_key(target, id)
if lease_lapses_at(target) <= now or not is_gateway_live(gateway, now)
  or redis.call('EXISTS', reservation) == 1 then
  return 1
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
return 1
