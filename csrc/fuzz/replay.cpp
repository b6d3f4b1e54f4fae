// Replays every input of the corpus without libFuzzer: kvasir_replay_corpus FOLDER, with a subfolder for each target.
#include <dirent.h>

#include <algorithm>
#include <string>

#include "input.h"

namespace {

struct Target {
    const char* name;
    void (*run)(const uint8_t* data, size_t size);
};

constexpr Target TARGETS[] = {
    {"attention", fuzz_attention}, {"delta", fuzz_delta}, {"indexer", fuzz_indexer}, {"linear", fuzz_linear},
    {"program", fuzz_program},     {"router", fuzz_router}, {"rows", fuzz_rows},     {"sampler", fuzz_sampler},
    {"scan", fuzz_scan},           {"short_conv", fuzz_short_conv}, {"streams", fuzz_streams},
    {"wkv", fuzz_wkv},
};

std::vector<std::string> files_of(const std::string& folder) {
    std::vector<std::string> names;
    DIR* dir = opendir(folder.c_str());
    kvasir_test::require(dir != nullptr, folder.c_str());
    while (const dirent* entry = readdir(dir)) {
        if (entry->d_name[0] != '.') names.push_back(folder + "/" + entry->d_name);
    }
    closedir(dir);
    std::sort(names.begin(), names.end());
    return names;
}

std::vector<uint8_t> read(const std::string& path) {
    std::vector<uint8_t> data;
    std::FILE* file = std::fopen(path.c_str(), "rb");
    kvasir_test::require(file != nullptr, path.c_str());
    for (int byte; (byte = std::fgetc(file)) != EOF;) data.push_back(static_cast<uint8_t>(byte));
    std::fclose(file);
    return data;
}

}  // namespace

int main(int argc, char** argv) {
    kvasir_test::require(argc == 2, "the only argument is the corpus folder");
    for (const Target& target : TARGETS) {
        const std::vector<std::string> files = files_of(std::string(argv[1]) + "/" + target.name);
        for (const std::string& file : files) {
            const std::vector<uint8_t> data = read(file);
            target.run(data.data(), data.size());
        }
        std::printf("fuzz corpus of %s: %zu inputs passed\n", target.name, files.size());
    }
    return 0;
}
