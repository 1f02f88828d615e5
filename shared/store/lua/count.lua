-- Counts requests that no executor answered: those of ensembles, which gateways answer. And what processes measured.
--
-- KEYS   tally of a model version, once per packed counts
-- ARGV   packed counts
-- reply  how many packed counts
-- Not safe to repeat: the counts would count twice.

for i, key in ipairs(KEYS) do tally(key, ARGV[i]) end
tally_all()
return #KEYS
