// The digest of the sources that the library was built from.
#include "kvasir_cpu.h"

#include "sources_digest.h"  // written by digest.cmake

const char* kvasir_sources_digest() { return KVASIR_SOURCES_DIGEST; }
