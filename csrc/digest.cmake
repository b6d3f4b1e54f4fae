# Writes sources_digest.h: the SHA-256 of what the library is built from, of lines "SHA-256 of a file, its name".
#   cmake -DFILES=<files, one after the other> -DHEADER=<path> -P digest.cmake
string(REPLACE "|" ";" FILES "${FILES}")
set(LINES "")
foreach(path IN LISTS FILES)
  file(SHA256 ${path} digest)
  get_filename_component(name ${path} NAME)
  string(APPEND LINES "${digest} ${name}\n")
endforeach()
string(SHA256 DIGEST "${LINES}")
file(WRITE ${HEADER} "#define KVASIR_SOURCES_DIGEST \"${DIGEST}\"\n")
