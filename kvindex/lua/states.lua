-- List the live targets. Writes nothing.
-- Returns per target {target, epoch, next_seq, gpu blocks, host blocks, lease left (ms), report}.

local now = now_ms()
local answer = {}
local leases = redis.call('ZRANGEBYSCORE', key('leases'), '(' .. integer(now), '+inf', 'WITHSCORES')
for position = 1, #leases, 2 do
  local target, lapses_at = leases[position], tonumber(leases[position + 1])
  local state = redis.call('HMGET', key('target', target), 'epoch', 'gen', 'next_seq', 'report')
  local sizes = inventory_size(target, state[2])
  answer[#answer + 1] = {
    target, state[1], tonumber(state[3] or 0), sizes.gpu, sizes.host, lapses_at - now, state[4]
  }
end
return answer
