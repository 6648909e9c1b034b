--- Files that are small and read whole.

local _M = {}

--- A function that gives the text of the file, or nil and why not.
function _M.reader(path)
    return function()
        local file, reason = io.open(path, "rb")
        if not file then
            return nil, reason
        end
        local text, failure = file:read("*a")
        file:close()
        return text, failure
    end
end

return _M
