//! The durable side of a handover: records of attempts, their ledger, and marks of fenced guests.

pub(crate) mod attempt_record;
pub(crate) mod fence;
pub(crate) mod ledger;
