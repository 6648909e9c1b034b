-- The table that operators tune: which device class takes which requests. It is data, no program:
-- numbers, strings and tables only. Copy it, name the copy in server.policy_file, and change it
-- there; a change holds within a second. A bad table is refused with the line at fault.
return {
    -- The first bucket whose `below` exceeds the estimated prompt tokens applies; the last has no
    -- `below`. Weights are shares by class. Classes that the stack does not have are left out and
    -- the rest share what remains.
    prompt_buckets = {
        { below = 50, weights = { cpu = 0.7, gpu = 0.3 } },
        { weights = { tpu = 0.6, gpu = 0.4 } },
    },
    -- The same by requests a second. `factors` multiply the weights of the bucket; `spread` is the
    -- share of the requests that follows `fallback` instead of the bucket.
    qps_bands = {
        { below = 100 },
        { factors = { cpu = 0.8 }, spread = 0.1 },
    },
    -- Weights where no class of the bucket is there or has room.
    fallback = { cpu = 1, gpu = 1, tpu = 1 },
    -- A tier with `prefer` takes the first of these classes that is healthy (heat and memory leave
    -- at least `healthy_factor` of it) and not full of the tier's own requests. Others go by
    -- weight.
    tiers = {
        vip = { prefer = { "tpu", "gpu", "cpu" }, healthy_factor = 0.5 },
    },
    -- Most requests at a class at once, as { cpu = 16 }; more go to other classes while those have
    -- room.
    caps = {},
    -- What a byte of a request body is worth, until the counts of the gateways have taught better:
    -- an English character is about 0.3 token, a Han character 3 bytes and about 0.6 token.
    tokens_per_ascii_byte = 0.3,
    tokens_per_non_ascii_byte = 0.2,
}
