-- Give a task back; what another owner has stays with it.
-- KEYS[1]: STRING as in registry_claim.lua. ARGV: owner.

if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('UNLINK', KEYS[1])
end
return 1
