--- What a request is charged and what it really used.

local edge = require("mirror.edge")
local prompt_estimate = require("mirror.prompt_estimate")
local ngx = ngx

local _M = {}

-- Upper bounds of the error of an estimate, as a part of the true count.
local ERRORS = { 0.1, 0.25, 0.5 }

--- Estimate the prompt of the body `sample` of `length` bytes and keep in `ctx` what `learn` needs.
function _M.estimate(ctx, sample, length)
    local policy = edge.policies:get()
    ctx.model = prompt_estimate.model(sample)
    ctx.ascii, ctx.non_ascii = prompt_estimate.bytes(sample, length)
    ctx.estimate = prompt_estimate.tokens(
        ctx.ascii, ctx.non_ascii, edge.token_rates:of(ctx.model, policy)
    )
    return ctx.estimate
end

-- The counts that the gateway told, in the headers of an answer or at the end of a stream.
local function told(ctx, var)
    local stream = ctx.event_stream
    if stream then
        return stream.prompt_tokens, stream.completion_tokens
    end
    local prompt = tonumber(var.upstream_http_x_mirror_prompt_tokens)
    return prompt, prompt and tonumber(var.upstream_http_x_mirror_completion_tokens) or 0
end

local function note_error(estimate, prompt)
    local part, label = math.abs(estimate - prompt) / prompt, "more"
    for _, bound in ipairs(ERRORS) do
        if part <= bound then
            label = tostring(bound)
            break
        end
    end
    edge.metrics:add("mirror_edge_prompt_estimates_total|" .. label, 1)
end

-- The tokens of an answer that nobody counted: none where it was refused; where a client left a
-- stream, about those that it has seen, or leaving early would be free.
local function guess(ctx, status)
    if status >= 400 and status ~= 499 then
        return 0
    end
    return ctx.charge.tokens + (ctx.event_stream and ctx.event_stream.chunks or 0)
end

--- After the answer: learn from the true counts and correct the tenant's charge.
function _M.settle(ctx)
    local var = ngx.var
    local prompt, completion = told(ctx, var)
    if not prompt or prompt < 1 then
        edge.admission:settle(ctx.caller, ctx.charge, guess(ctx, tonumber(var.status) or 0))
        return
    end
    note_error(ctx.estimate, prompt)
    edge.token_rates:learn(ctx.model, ctx.ascii, ctx.non_ascii, prompt, (edge.policies:get()))
    edge.admission:settle(ctx.caller, ctx.charge, prompt + completion)
end

return _M
