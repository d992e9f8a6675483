-- Raise what scopes have spent to at least what a gateway remembers, for a store that has forgotten.
-- ARGV: for each account: scope, 'day' or 'month', the day or month, tokens. Writes spent:.

for i = 1, #ARGV, 4 do
  local scope, kind, period, tokens = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3])
  local missing = tokens - spent(scope, period)
  if missing > 0 then
    spend(scope, kind, period, missing)
  end
end
return 1
