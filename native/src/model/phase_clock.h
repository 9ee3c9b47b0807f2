// Where a step's time goes: at every moment exactly one phase is running on the calling thread.
#pragma once

#include <array>
#include <chrono>

#include "colibri/engine.h"

namespace colibri {

class PhaseClock {
  public:
    using Clock = std::chrono::steady_clock;

    void start() {
        seconds_.fill(0);
        phase_ = Phase::other;
        since_ = Clock::now();
    }

    // Returns the phase that ran before.
    Phase enter(Phase phase) {
        const Clock::time_point now = Clock::now();
        seconds_[static_cast<int>(phase_)] += std::chrono::duration<double>(now - since_).count();
        since_ = now;
        const Phase before = phase_;
        phase_ = phase;
        return before;
    }

    const std::array<double, kPhases>& seconds() const { return seconds_; }

    class Scope {
      public:
        Scope(PhaseClock& clock, Phase phase) : clock_(clock), before_(clock.enter(phase)) {}
        ~Scope() { clock_.enter(before_); }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

      private:
        PhaseClock& clock_;
        Phase before_;
    };

  private:
    std::array<double, kPhases> seconds_{};
    Phase phase_ = Phase::other;
    Clock::time_point since_;
};

}  // namespace colibri
