-- Tell what scopes have used.
-- ARGV: gateway, now, day, month, scopes. Returns the use of each. Writes nothing but window:, sums:
-- and running:, from which it takes what counts no more.

local uses = {}
for i = 5, #ARGV do
  uses[#uses + 1] = flat_use(use(ARGV[i], ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]))
end
return uses
