--- Tokens per ASCII and per non-ASCII byte of a request body, learned for each model from the
-- counts that gateways give back.
--
-- Recursive least squares on the logarithm of the error, with forgetting. A count is believed up to
-- a factor of `SURPRISE` away from the estimate only: an odd body moves the rates no more than
-- others, and makes them less sure of themselves, so that prompts of another kind are soon learned.
-- A body of few tokens is mostly JSON around them and teaches little: as many tiny prompts as
-- others would else leave no estimate of the others right. The state lies in a shared dict: all
-- workers teach it, and it outlives a reload. Of two lessons at once one may be lost.

local format, match = string.format, string.match
local exp, log, min, max = math.exp, math.log, math.min, math.max

local _M = {}
local TokenRates = {}
TokenRates.__index = TokenRates

local FORGETTING, FORGETTING_SURPRISED = 0.99, 0.95
local NOISE = 0.04
local SURPRISE = 2
-- Counts of so many tokens teach half as much as long ones.
local FEW_TOKENS = 50
local STEP_MAX = log(2)
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
    return bounded(rate * exp(bounded(part, -STEP_MAX, STEP_MAX)), RATE_MIN, RATE_MAX)
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
    -- Each rate's part of the estimate; what is learned is by how much it should be multiplied.
    local x, y = a * ascii_bytes / estimate, b * other_bytes / estimate
    local gx, gy = paa * x + pab * y, pab * x + pbb * y
    local noise = NOISE * (1 + FEW_TOKENS / tokens)
    local scale = 1 / (FORGETTING * noise + x * gx + y * gy)
    local fault = log(believed / estimate) * scale
    self.dict:set(key .. "|ascii", moved(a, gx * fault))
    self.dict:set(key .. "|other", moved(b, gy * fault))
    -- What cannot be believed makes nothing surer.
    local gained, kept = scale, FORGETTING
    if believed ~= tokens then
        gained, kept = 0, FORGETTING_SURPRISED
    end
    paa = min(DOUBT_MAX, (paa - gx * gx * gained) / kept)
    pbb = min(DOUBT_MAX, (pbb - gy * gy * gained) / kept)
    -- Bounded doubts must stay those of a positive matrix.
    local widest = 0.99 * math.sqrt(max(0, paa * pbb))
    pab = bounded((pab - gx * gy * gained) / kept, -widest, widest)
    self.dict:set(key .. "|doubt", format("%.9g %.9g %.9g", paa, pab, pbb))
end

return _M
