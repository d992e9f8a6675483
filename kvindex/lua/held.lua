-- Tell which blocks of one part a live target holds. Writes nothing.
-- ARGV: target, "<group>:<tier>", concatenated 8-byte hashes.
-- Returns {epoch, next sequence number, "1" or "0" for each hash}; nil when the target is not live.

local target, part, hashes = ARGV[1], ARGV[2], ARGV[3]
if lease_lapses_at(target) <= now_ms() then
  return false
end
local slot = redis.call('HGET', key('slots'), target)
local opened, prefix, shelf, flags = open_table(part), prefix_of(slot), shelf_of(slot), {}
for position = 1, #hashes, HASH_BYTES do
  local digits, last_nine = digits_of(hashes, position)
  local bucket = bucket_of(opened, address_of(last_nine, shelf))
  flags[#flags + 1] = redis.call('SISMEMBER', bucket, prefix .. digits)
end
return {
  redis.call('HGET', key('epochs'), target),
  tonumber(redis.call('HGET', key('next_seqs'), target) or 0),
  table.concat(flags),
}
