// Threads of a reader are made while this lives: signals belong to the program's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace colibri {

// An interrupt must wake the thread that waits for a step, not a read.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t before_;
};

}  // namespace colibri
