//! Base images: their format ([`Manifest`]), the repositories that hold them ([`Repository`]), lazy
//! disks that are read while their content is being fetched ([`ImageDisk`]), and their files on a
//! host ([`Bases`]).
//!
//! docs/image-repository.md describes the format.

mod bases;
mod disk;
pub mod front;
mod heat;
mod import;
mod manifest;
mod marker;
mod name;
mod remove;
mod repository;
mod source;
pub mod store;
mod stripe;
mod verify;

pub use bases::{Bases, BringError, Bringing};
pub use disk::{Fetched, ImageDisk, ImageNotice, OpenImageError, Order};
pub use import::{ImportError, ImportOptions, ImportProgress, Imported, import};
pub use manifest::{Manifest, ManifestError, SIZE_BYTES_MAX, STRIPE_BYTES, Stripe};
pub use marker::Owner;
pub use name::{Digest, ImageId, ImageName, NotADigest, NotAName};
pub use remove::{RemoveError, Removed, remove};
pub use repository::{FindError, Repository, RepositoryError, StripeError};
pub use source::{Source, SourceError, SourceFormat};
pub use stripe::{StripeFault, decode_stripe, encode_stripe};
pub use verify::{Verified, VerifyError, verify};
