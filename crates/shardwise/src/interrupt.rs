//! Signals that would end the process, put off while something half-written is about: the work stops at its next look,
//! removes what it began, and then the signal has its effect.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use shardwise_comm::launch::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register_conditional_default, register_usize};
use signal_hook::low_level::emulate_default_handler;

/// While it lives, signals wait.
pub(crate) struct PutOff(&'static Handlers);

struct Handlers {
    /// Whether a signal ends the process at once.
    at_once: Arc<AtomicBool>,
    /// The last signal that did not; 0 for none.
    arrived: Arc<AtomicUsize>,
}

/// Handlers cannot be taken back, only told to do what the system would do: they are set once.
static HANDLERS: OnceLock<Handlers> = OnceLock::new();

impl Handlers {
    fn set() -> Self {
        let handlers = Self { at_once: Arc::new(AtomicBool::new(true)), arrived: Arc::default() };
        for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal)) {
            // Where a handler cannot be set, the signal ends the process at once, as ever.
            let _ = register_conditional_default(signal, handlers.at_once.clone())
                .and_then(|_| register_usize(signal, handlers.arrived.clone(), signal as usize));
        }
        handlers
    }
}

impl PutOff {
    /// Puts signals off from now on. One such value at a time.
    pub(crate) fn new() -> Self {
        let handlers = HANDLERS.get_or_init(Handlers::set);
        handlers.at_once.store(false, Ordering::SeqCst);
        Self(handlers)
    }

    /// Whether a signal waits: the work should end.
    pub(crate) fn is_due(&self) -> bool {
        self.0.arrived.load(Ordering::SeqCst) != 0
    }
}

impl Drop for PutOff {
    fn drop(&mut self) {
        self.0.at_once.store(true, Ordering::SeqCst);
        let signal = self.0.arrived.swap(0, Ordering::SeqCst);
        if signal != 0 {
            // If this fails, the run ends with the error of the work that was cut short.
            let _ = emulate_default_handler(signal as i32);
        }
    }
}
