local methods = require("mirror.methods")
local request_id = require("mirror.request_id")
local ngx = ngx

return function()
    local path, method = ngx.var.uri, ngx.req.get_method()
    ngx.var.mirror_request_id = request_id.get()
    if not methods.is_allowed(path, method) then
        return ngx.exit(ngx.HTTP_NOT_ALLOWED)
    end
    if method == "OPTIONS" then
        ngx.header["Allow"] = methods.allow(path)
        return ngx.exit(ngx.HTTP_NO_CONTENT)
    end
    if method == "HEAD" then
        -- nginx leaves the body out for the client; gateways need only know GET.
        ngx.var.mirror_method = "GET"
    end
end
