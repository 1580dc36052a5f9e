//! What an agent remembers of base images that arrive while guests run.

use crate::host::lock::lock;
use longhaul_image::ImageId;
use longhaul_image::front::told;
use longhaul_storage::front::FrontFolder;
use std::collections::HashMap;
use std::sync::Mutex;

/// State of arriving base images, in addition to the notes.
#[derive(Debug, Default)]
pub(crate) struct ComingExports {
    /// Held while notes are changed.
    pub(crate) notes: tokio::sync::Mutex<()>,
    /// The bytes read for each image that some migration has counted.
    pub(crate) counted: Mutex<HashMap<ImageId, u64>>,
    /// The last logged reason why an image does not arrive.
    pub(crate) troubles: Mutex<HashMap<ImageId, Option<String>>>,
}

impl ComingExports {
    /// Returns the bytes read for a base image that no migration has counted yet, and counts them.
    pub(crate) fn count(&self, folder: &FrontFolder, id: ImageId) -> u64 {
        let read = told(folder);
        let read = read.unwrap_or_default().read_bytes;
        let mut counted = lock(&self.counted);
        let before = counted.insert(id, read).unwrap_or(0);
        read.saturating_sub(before)
    }
}
