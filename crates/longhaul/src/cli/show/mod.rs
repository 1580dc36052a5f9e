//! Formats the output of commands: pure functions from the API's types to lines.

pub(crate) mod discovered;
pub(crate) mod doubt;
pub(crate) mod events;
pub(crate) mod fetching;
pub(crate) mod figure;
pub(crate) mod group;
pub(crate) mod image;
pub(crate) mod journal;
pub(crate) mod list;
pub(crate) mod live;
pub(crate) mod parcel;
pub(crate) mod plan;
pub(crate) mod properties;
pub(crate) mod realm;
pub(crate) mod replica;
pub(crate) mod report;
#[cfg(test)]
pub(crate) mod sample;
