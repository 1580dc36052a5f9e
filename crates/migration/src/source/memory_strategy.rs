//! The strategies of the memory: the engine's, and what of the memory may follow by each.

use longhaul_api::{ApiError, ErrorCode, Strategy as Choice};
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::disk::Pulled;

/// Returns the engine's row for a strategy of the memory.
pub(crate) fn of_memory(strategy: Choice) -> Strategy {
    match strategy {
        Choice::Precopy | Choice::Auto => Strategy::PRECOPY,
        Choice::Hybrid => Strategy::HYBRID,
        Choice::Postcopy => Strategy::POSTCOPY,
    }
}

/// Returns the part of the memory that may follow by a strategy.
pub(crate) fn follows_by(strategy: Choice) -> Pulled {
    match strategy {
        Choice::Precopy => Pulled::Nothing,
        Choice::Hybrid | Choice::Auto => Pulled::Often,
        Choice::Postcopy => Pulled::All,
    }
}

/// Refuses a memory file of memory that does not follow.
pub(crate) fn check_keeping(strategy: Choice, keeps: bool) -> Result<(), ApiError> {
    if !keeps || strategy != Choice::Precopy {
        return Ok(());
    }
    let text = "there is no memory to keep (`keep_memory`): with the strategy precopy all of it is \
                at the destination before the guest runs there";
    let hint = "leave out --keep-memory, or choose --strategy hybrid, postcopy or auto";
    Err(ApiError::new(ErrorCode::InvalidRequest, text).hint(hint))
}

/// Returns the refusal of a destination that does not know of memory that follows.
pub(crate) fn too_old_to_follow(host: &str, software: &str) -> ApiError {
    let text = format!("{host} runs {software:?}, to which no memory can follow its guest");
    let hint = format!("update the agent on {host}, or leave out --strategy");
    ApiError::new(ErrorCode::Refused, text).hint(hint)
}
