// Replays the fuzzer's corpus: `replay FOLDER`, with a folder of files for each format.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "parsing.h"

int main(int argc, char** argv) {
  CHECK(argc == 2);
  int num_inputs = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(argv[1])) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string input(std::istreambuf_iterator<char>(file), {});
    std::cout << entry.path() << std::endl;  // names the input of a crash
    trireme::test::check_input(entry.path().parent_path().filename().string(), input);
    ++num_inputs;
  }
  CHECK(num_inputs > 0);
  return 0;
}
