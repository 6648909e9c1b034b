--- What a key allows: requests at once, requests a minute, tokens a minute.
--
-- Use is counted by tenant and compared with the limits of the key that asks, so that a second key
-- buys a tenant nothing. Each count is raised first and taken back where it is too high: workers
-- that look at once can refuse one request too many, never admit one.

local sliding_window = require("mirror.sliding_window")
local format, max, floor, ceil = string.format, math.max, math.floor, math.ceil

local _M = {}
local Admission = {}
Admission.__index = Admission

local MINUTE_S = 60
local PARTS = 30

--- `dict`: a shared dict; `flight`: an `InFlight`; `clock`: a function of seconds.
function _M.new(dict, flight, clock)
    return setmetatable({
        flight = flight,
        requests = sliding_window.new(dict, "requests", MINUTE_S, PARTS, clock),
        tokens = sliding_window.new(dict, "tokens", MINUTE_S, PARTS, clock),
    }, Admission)
end

local function refusal(reason, message, limit, wait_s)
    return {
        reason = reason,
        message = format(message, limit),
        -- A whole second at least, as the header has no parts of one.
        retry_after_s = max(1, ceil(wait_s - 1e-3)),
    }
end

--- Take a place for a request of `caller`. True, or nil and `{reason, message,
-- retry_after_s}`. A place taken is given back by `leave`.
function Admission:enter(caller)
    local tenant, most = caller.tenant, caller.requests_per_minute
    local at_once = self.flight:add("tenant|" .. tenant, 1)
    if caller.concurrency and at_once > caller.concurrency then
        self:leave(caller)
        local message = "This key allows %d requests at once; wait until one is answered."
        return nil, refusal("concurrency", message, caller.concurrency, 1)
    end
    if most then
        local sum, index = self.requests:add(tenant, 1)
        if sum > most then
            self.requests:take_back(tenant, 1, index)
            self:leave(caller)
            local wait_s = self.requests:seconds_until(tenant, most - 1)
            return nil, refusal("requests", "This key allows %d requests a minute.", most, wait_s)
        end
    end
    return true
end

function Admission:leave(caller)
    self.flight:add("tenant|" .. caller.tenant, -1)
end

--- Take `tokens`, the estimate of a prompt, from the budget. A charge for `settle`; or nil and
-- `{reason, message, retry_after_s, is_final}`: `is_final` where the request is larger than the
-- whole budget.
function Admission:charge(caller, tokens)
    local most = caller.tokens_per_minute
    if not most then
        return { tokens = tokens }
    end
    local sum, index = self.tokens:add(caller.tenant, tokens)
    if sum <= most then
        return { tokens = tokens, index = index }
    end
    self.tokens:take_back(caller.tenant, tokens, index)
    local wait_s = self.tokens:seconds_until(caller.tenant, max(0, most - tokens))
    local refused = refusal("tokens", "This key allows %d tokens a minute.", most, wait_s)
    refused.is_final = tokens > most
    return nil, refused
end

--- Correct a charge by what was really used, prompt and answer together.
function Admission:settle(caller, charge, used)
    if not charge.index then
        return
    end
    if used >= charge.tokens then
        self.tokens:add(caller.tenant, used - charge.tokens)
    else
        self.tokens:take_back(caller.tenant, charge.tokens - used, charge.index)
    end
end

-- As OpenAI writes it: 120ms, 7.2s, 6m0s.
local function duration(seconds)
    if seconds < 1 then
        return format("%dms", ceil(seconds * 1000 - 1e-3))
    elseif seconds < MINUTE_S then
        return format("%.3gs", seconds)
    end
    return format("%dm%ds", floor(seconds / MINUTE_S), floor(seconds % MINUTE_S))
end

local function describe(headers, window, tenant, limit, what)
    if not limit then
        return
    end
    headers["x-ratelimit-limit-" .. what] = format("%d", limit)
    headers["x-ratelimit-remaining-" .. what] =
        format("%d", max(0, floor(limit - window:sum(tenant))))
    headers["x-ratelimit-reset-" .. what] = duration(window:seconds_until(tenant, 0))
end

--- The `x-ratelimit-*` headers of an answer to `caller`, or nil where its key has no such limit.
function Admission:headers(caller)
    if not caller.requests_per_minute and not caller.tokens_per_minute then
        return nil
    end
    local headers = {}
    describe(headers, self.requests, caller.tenant, caller.requests_per_minute, "requests")
    describe(headers, self.tokens, caller.tenant, caller.tokens_per_minute, "tokens")
    return headers
end

return _M
