-- Take a task, or keep it: only its owner holds it until it lapses.
-- KEYS[1]: STRING "pf:{registry}:claim:<name>", the owner; expires. ARGV: owner, lease_ms.
-- Returns 1; 0 while another owner has it.

local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
