-- Drop a target at once; an old epoch changes nothing.
-- ARGV: target, epoch. Writes every key of the target (keyspace.lua).

local target, epoch = ARGV[1], ARGV[2]
if redis.call('HGET', key('epochs'), target) == epoch then
  drop_target(target)
  slots_sweep()
end
return 1
