std = "ngx_lua"
max_line_length = 100
files["**/spec/*.lua"] = { std = "luajit+busted", globals = { "ngx" } }
