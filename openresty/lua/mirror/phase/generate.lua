local body = require("mirror.body")
local edge = require("mirror.edge")
local errors = require("mirror.errors")
local prompt_estimate = require("mirror.prompt_estimate")
local read = require("mirror.phase.read")
local ngx = ngx

return function()
    read()
    local sample, length = body.read(edge.body_timeout_s)
    if not sample then
        return errors.send(length, length == 400)
    end
    local ctx, var = ngx.ctx, ngx.var
    local tokens = prompt_estimate.tokens(sample, length, edge.policy)
    ctx.tier = "standard"
    ctx.class = edge.router:choose({ prompt_tokens = tokens })
    var.mirror_device = ctx.class
    var.mirror_tier = ctx.tier
    var.mirror_tenant = "default"
    var.mirror_prompt_estimate = tokens
end
