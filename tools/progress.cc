// SPDX-License-Identifier: Apache-2.0
// Progress: a bar on stderr.
#include "tools/progress.h"

#include <algorithm>
#include <cstdio>

#include <fmt/format.h>

#include "tools/interrupt.h"
#include "tools/output.h"
#include "tools/terminal.h"

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
  if (!can_redraw_stderr()) return;
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
  stop_if_interrupted();
  const std::lock_guard lock(mutex_);
  done_ += work_;
  if (work_ > 0) part_start_ = std::chrono::steady_clock::now();
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
  show(fmt::format("{}[{:#<{}}{:.<{}}] {:3.0f}%  {:.0f} s{}  {:.28}", kEraseLine, "", filled, "",
                   kBarWidth - filled, 100 * share, elapsed.count(), time_left(), what_));
  drawn_ = true;
}

/// By the speed of the parts that are done; nothing while none is.
std::string Progress::time_left() const {
  using Seconds = std::chrono::duration<double>;
  if (done_ <= 0) return {};
  const double spent = Seconds(part_start_ - start_).count();
  const double in_part = Seconds(std::chrono::steady_clock::now() - part_start_).count();
  const double left = spent * (total_ - done_) / done_ - in_part;
  return fmt::format(", {:.0f} s left", std::max(left, 0.0));
}

void Progress::erase() {
  if (!drawn_) return;
  show(kEraseLine);
  drawn_ = false;
}

}  // namespace winnow::tools
