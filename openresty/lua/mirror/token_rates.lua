--- Tokens per ASCII and per non-ASCII byte of a request body, learned for each model from the
-- counts that gateways give back.
--
-- Recursive least squares on the relative error, with forgetting. A count is believed up to a
-- factor of `SURPRISE` away from the estimate only: an odd body (60 bytes whose prompt is one
-- token) moves the rates no more than others, and makes them no surer of themselves. The state
-- lies in a shared dict: all workers teach it, and it outlives a reload. Of two lessons at once
-- one may be lost.

local format, match = string.format, string.match
local min, max = math.min, math.max

local _M = {}
local TokenRates = {}
TokenRates.__index = TokenRates

local FORGETTING = 0.99
local NOISE = 0.04
local SURPRISE = 2
local DOUBT, DOUBT_MAX = 1, 4
local RATE_MIN, RATE_MAX = 0.01, 4
-- Of bodies that do not say which of the models they are for.
local SHARED = "rates|"

--- `models`: the names served. Another one in a body, which is made up, gets no rates of its own.
function _M.new(dict, models)
    local keys = {}
    for _, model in ipairs(models) do
        keys[model] = SHARED .. model
    end
    return setmetatable({ dict = dict, keys = keys }, TokenRates)
end

local function key_of(self, model)
    return model and self.keys[model] or SHARED
end

local function rates_at(self, key, policy)
    local ascii = self.dict:get(key .. "|ascii")
    local other = ascii and self.dict:get(key .. "|other")
    if other then
        return ascii, other
    end
    return policy.tokens_per_ascii_byte, policy.tokens_per_non_ascii_byte
end

--- The rates for `model` (nil where the body does not say): those learned, else the policy's.
function TokenRates:of(model, policy)
    return rates_at(self, key_of(self, model), policy)
end

local function bounded(value, low, high)
    return min(high, max(low, value))
end

local function moved(rate, part)
    return bounded(rate * (1 + bounded(part, -0.5, 1)), RATE_MIN, RATE_MAX)
end

--- Learn that a body of so many bytes had `tokens` prompt tokens.
function TokenRates:learn(model, ascii_bytes, other_bytes, tokens, policy)
    if tokens <= 0 or ascii_bytes + other_bytes <= 0 then
        return
    end
    local key = key_of(self, model)
    local a, b = rates_at(self, key, policy)
    local doubts = self.dict:get(key .. "|doubt") or ""
    local paa, pab, pbb = match(doubts, "^(%S+) (%S+) (%S+)$")
    paa, pab, pbb = tonumber(paa) or DOUBT, tonumber(pab) or 0, tonumber(pbb) or DOUBT
    local estimate = a * ascii_bytes + b * other_bytes
    local believed = bounded(tokens, estimate / SURPRISE, estimate * SURPRISE)
    -- Each rate's part of the count; what is learned is by how much it should be multiplied.
    local x, y = a * ascii_bytes / believed, b * other_bytes / believed
    local gx, gy = paa * x + pab * y, pab * x + pbb * y
    local scale = 1 / (FORGETTING * NOISE + x * gx + y * gy)
    local fault = (1 - x - y) * scale
    self.dict:set(key .. "|ascii", moved(a, gx * fault))
    self.dict:set(key .. "|other", moved(b, gy * fault))
    -- What cannot be believed makes nothing surer.
    local gained = believed == tokens and scale or 0
    paa = min(DOUBT_MAX, (paa - gx * gx * gained) / FORGETTING)
    pbb = min(DOUBT_MAX, (pbb - gy * gy * gained) / FORGETTING)
    -- Bounded doubts must stay those of a positive matrix.
    local widest = 0.99 * math.sqrt(max(0, paa * pbb))
    pab = bounded((pab - gx * gy * gained) / FORGETTING, -widest, widest)
    self.dict:set(key .. "|doubt", format("%.9g %.9g %.9g", paa, pab, pbb))
end

return _M
