return require("mirror.edge").configure
