--- Files that are small and read whole.

local _M = {}

--- A function that gives the text of the file, or nil and why not. Of a file with more than
-- `bytes_max` bytes, where that is given, it gives the first `bytes_max + 1`.
function _M.reader(path, bytes_max)
    local what = bytes_max and bytes_max + 1 or "*a"
    return function()
        local file, reason = io.open(path, "rb")
        if not file then
            return nil, reason
        end
        local text, failure = file:read(what)
        file:close()
        -- At the end of a file a number of bytes is nil, with no reason.
        return text or (not failure and "" or nil), failure
    end
end

return _M
