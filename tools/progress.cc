// SPDX-License-Identifier: Apache-2.0
// Progress: a bar on stderr.
#include "tools/progress.h"

#include <algorithm>
#include <cstdio>

#include <fmt/format.h>
#include <unistd.h>

#include "tools/output.h"

namespace winnow::tools {
namespace {

constexpr auto kTick = std::chrono::milliseconds(250);
constexpr double kQuietSeconds = 1;
constexpr int kBarWidth = 20;
constexpr char kEraseLine[] = "\r\033[K";

/// Unlike fmt::print it does not throw, which would end the program if the terminal has gone.
void show(const std::string& text) {
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace

Progress::Progress(double total) : total_(total) {
  if (isatty(STDERR_FILENO) == 0) return;
  thread_ = std::jthread([this](const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
      wake_.wait_for(lock, stop, kTick, [] { return false; });
      if (!stop.stop_requested()) draw();
    }
  });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  thread_.join();
  erase();
}

void Progress::begin(std::string_view what, double work) {
  const std::lock_guard lock(mutex_);
  done_ += work_;
  work_ = work;
  what_ = what;
}

void Progress::print(std::string_view text) {
  const std::lock_guard lock(mutex_);
  erase();
  fmt::print("{}", text);
  flush_output();
}

void Progress::draw() {
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  if (elapsed.count() < kQuietSeconds) return;
  const double share = total_ > 0 ? std::clamp(done_ / total_, 0.0, 1.0) : 0;
  const int filled = static_cast<int>(share * kBarWidth);
  // Short enough for a line of 80.
  show(fmt::format("{}[{:#<{}}{:.<{}}] {:3.0f}%  {:.0f} s  {:.42}", kEraseLine, "", filled, "",
                   kBarWidth - filled, 100 * share, elapsed.count(), what_));
  drawn_ = true;
}

void Progress::erase() {
  if (!drawn_) return;
  show(kEraseLine);
  drawn_ = false;
}

}  // namespace winnow::tools
