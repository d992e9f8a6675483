-- List the live targets. Writes nothing.
-- Returns per target {target, epoch, next_seq, gpu blocks, host blocks, lease left (ms), report}.

local now = now_ms()
local sizes = inventory_sizes()
local answer = {}
local leases = redis.call('ZRANGEBYSCORE', key('leases'), '(' .. integer(now), '+inf', 'WITHSCORES')
for position = 1, #leases, 2 do
  local target, lapses_at = leases[position], tonumber(leases[position + 1])
  local slot = redis.call('HGET', key('slots'), target)
  answer[#answer + 1] = {
    target,
    redis.call('HGET', key('epochs'), target),
    tonumber(redis.call('HGET', key('next_seqs'), target) or 0),
    sizes.gpu[slot] or 0,
    sizes.host[slot] or 0,
    lapses_at - now,
    redis.call('HGET', key('reports'), target),
  }
end
return answer
