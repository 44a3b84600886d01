// Pool: every task once, many callers, exceptions.
#include "base/pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace trireme;

namespace {

void every_task_runs_once() {
  Pool pool(4);
  CHECK_EQUAL(pool.threads(), 4);
  for (std::size_t num_tasks : {0, 1, 3, 1000}) {
    std::vector<std::atomic<int>> runs(num_tasks);
    pool.run(num_tasks, [&](std::size_t i) { runs[i].fetch_add(1); });
    for (auto& count : runs) CHECK_EQUAL(count.load(), 1);
  }
}

void a_forked_child_works_alone_and_ends() {
  const pid_t child = [] {
    auto pool = std::make_unique<Pool>(3);
    pool->run(100, [](std::size_t) {});
    const pid_t forked = fork();
    if (forked == 0) {
      int total = 0;
      pool->run(100, [&](std::size_t) { ++total; });
      pool.reset();
      _exit(total == 100 ? 0 : 1);
    }
    return forked;
  }();
  int status = -1;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK_EQUAL(status, 0);
}

void callers_share_the_pool() {
  Pool pool(3);
  std::atomic<int> total{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round)
        pool.run(17, [&](std::size_t) { total.fetch_add(1); });
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK_EQUAL(total.load(), 4 * 50 * 17);
}

void first_exception_reaches_the_caller() {
  Pool pool(2);
  bool caught = false;
  try {
    pool.run(8, [](std::size_t i) {
      if (i == 5) throw Error(ErrorCode::kBadRequest, "task 5");
    });
  } catch (const Error& error) {
    caught = std::string(error.what()) == "task 5";
  }
  CHECK(caught);
  std::atomic<int> runs{0};
  pool.run(8, [&](std::size_t) { runs.fetch_add(1); });
  CHECK_EQUAL(runs.load(), 8);
}

}  // namespace

int main() {
  every_task_runs_once();
  a_forked_child_works_alone_and_ends();
  callers_share_the_pool();
  first_exception_reaches_the_caller();
  return 0;
}
